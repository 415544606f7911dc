"""This computer, without a mesh: memory, accelerators, disk, power, network interfaces.

Doors: `parts` builds what a node needs; `memory` and `pressure` say how much is free; `accelerators` which devices
there are; `power` what is drawn; `interfaces` the addresses; `wake_on_lan` sends the packet that wakes another machine.

Invariants: a reading that fails is unknown, never zero; tools of the system are asked with a deadline and a bounded
output.

Not here: decisions that follow from a reading (`domain`, `cli.doctor`).
"""

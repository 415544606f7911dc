"""How values cross processes: codecs, the ring's streams, the control plane, and the pipe between node and runner."""

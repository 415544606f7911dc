"""The ranks of a tensor group: how they meet, their environment, and how the leader hands frames on."""

"""Moves values between processes: codecs, the ring's streams, the control plane, and the pipe from node to runner."""

"""Pure values and decisions. No module here uses a clock, a socket, an event loop or a tensor library."""

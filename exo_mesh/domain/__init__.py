"""Pure values and decisions. Nothing here knows a clock, a socket, an event loop or a tensor library."""

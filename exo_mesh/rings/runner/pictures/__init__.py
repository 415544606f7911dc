"""The images of requests at a driver: what entry peers have sent, and what goes round the ring."""

"""The node: wires the parts of this peer together, starts and stops them, and answers the API and other peers."""

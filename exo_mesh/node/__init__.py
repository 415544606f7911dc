"""This machine in the mesh: what it hosts, what it places, and the requests that enter here."""

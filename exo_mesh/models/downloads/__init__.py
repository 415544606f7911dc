"""What this node fetches of models: who asks for it, where the bytes come from, room for them, records of it."""

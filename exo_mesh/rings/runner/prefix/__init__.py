"""The prefix cache of a driver: what stages keep of ended requests, and what new prompts take from it. Pure."""

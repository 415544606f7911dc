"""OpenAI's dialect: its bodies, checks and replies, to and from the neutral request and events of api.core."""

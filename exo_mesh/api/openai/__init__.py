"""OpenAI's dialect: translates its bodies to the neutral request of api.core, and neutral events to its replies."""

"""The dialect of Anthropic's Messages API: bodies, checks, replies, errors and its list of models."""

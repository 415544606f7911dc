"""What a model writes, taken apart: answer, reasoning and tool calls, by the markers of its family."""

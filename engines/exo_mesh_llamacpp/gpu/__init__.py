"""The GPUs of a llama.cpp library: asks for them, and plans which layers they take."""

"""The disk tier at one stage: the threads that write and read its files."""

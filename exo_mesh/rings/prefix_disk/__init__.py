"""The disk tier of the prefix cache: files with the KV that one stage has computed for a prompt, and their folders."""

"""Commands that work on files: each in a file, which imports the engine only when it runs."""

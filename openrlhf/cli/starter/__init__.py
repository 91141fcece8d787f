"""The command `init`: `tasks` are the values for each task, `files` writes the YAML file and a code file next to it."""

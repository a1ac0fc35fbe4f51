"""Options of the command line: tables, files, flags, values."""

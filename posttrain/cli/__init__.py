"""The `posttrain` command."""

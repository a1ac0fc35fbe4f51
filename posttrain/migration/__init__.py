"""For scripts that were written for TRL: its script arguments and parser, and its module names answered by posttrain."""

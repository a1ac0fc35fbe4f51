"""Episodes: who speaks when, with which tools, in which environment."""

"""What an online trainer has: agents, engines, weight sync, rollout logs."""

"""Between those who write rollouts and the loader that trains on them: who has which prompt, and what may be trained when."""

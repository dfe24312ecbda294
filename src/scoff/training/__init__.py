"""Training: `engine.fit` of every experiment, from batches (`batch_loop`) or by PPO (`ppo`)."""

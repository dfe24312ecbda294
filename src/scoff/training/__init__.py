"""Training loops: `engine.fit` of every supervised experiment, `ppo.PPO` of agents."""

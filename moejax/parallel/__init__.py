"""What runs on a mesh: sharding rules, pipeline schedules and executor, train step, distributed optimizer."""

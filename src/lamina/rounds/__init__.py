"""What a round is before anything runs: settings, clients, the plan, aggregation, schedules, bytes."""

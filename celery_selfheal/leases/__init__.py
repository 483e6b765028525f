"""Who may run a task: the lease, its fence and the journal of starts."""

"""The user's database: our tables, their migrations, and one engine for each process."""

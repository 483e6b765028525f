"""The outbox: messages that wait in the user's database for the commit that wants them sent."""

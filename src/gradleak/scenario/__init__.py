"""What is trained, how, what the server sees of it, and what hides it: task, client, observation, defence."""

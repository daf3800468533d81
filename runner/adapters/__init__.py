"""What differs from one framework, launcher, provider or notifier to the next: a module and a line."""

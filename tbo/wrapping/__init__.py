"""Putting a model under the scheduler: deciding, recording, cutting, running, leaving."""

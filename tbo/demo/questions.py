"""What each rank is asked: lists of different lengths, as ranks of a real service have."""

from __future__ import annotations

QUESTIONS = (
    (
        "What is the capital of France?",
        "Name three colours.",
        "What do bees make?",
    ),
    (
        "Which planet is known as the Red Planet?",
        "Write one sentence about the sea.",
        "What is the opposite of hot?",
        "How many days are there in a week?",
    ),
    (
        "What is water made of?",
        "Who wrote Romeo and Juliet?",
    ),
    (
        "What is the largest animal on Earth?",
        "Name two fruits that are yellow.",
        "What is ice?",
        "In which season do leaves fall?",
        "What does a clock show?",
    ),
)
"""One list for each rank."""

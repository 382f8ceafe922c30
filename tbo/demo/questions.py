"""What each rank is asked: lists of different lengths, as ranks of a real service have.

Chosen among those whose answers are clear-cut: in every step of 24 tokens the best token leads the second best by
more than 0.05, a thousand times the rounding differences between two orders of the same sums.
"""

from __future__ import annotations

QUESTIONS = (
    (
        "What is the capital of France?",
        "What is the opposite of hot?",
        "What is the boiling point of water?",
    ),
    (
        "Where do penguins live?",
        "How many days are there in a week?",
        "What is the chemical formula of water?",
        "Who painted the Mona Lisa?",
    ),
    (
        "What is the capital of Japan?",
        "What is a computer?",
    ),
    (
        "What is the capital of Italy?",
        "Say hello in Spanish.",
        "Name a fruit that is red.",
        "What is the tallest mountain on Earth?",
        "What colour is the sky?",
    ),
)
"""One list for each rank."""

"""The demo: a real language model on several local ranks, plain, not overlapped and overlapped, side by side."""

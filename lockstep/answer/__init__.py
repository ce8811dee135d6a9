"""What a verification answers: names of mistakes, and a verdict as text, JSON and page."""

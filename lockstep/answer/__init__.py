"""What a verification answers: causes of differences, and what to do about them."""

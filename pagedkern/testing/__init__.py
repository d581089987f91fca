"""What every backend's tests share: one case list, one way to build inputs, one comparison, one timer."""

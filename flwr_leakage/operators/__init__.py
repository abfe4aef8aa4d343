"""Linear operators with exact products: the Jacobian of the gradient map."""

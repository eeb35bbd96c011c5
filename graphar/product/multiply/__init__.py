"""What multiplies one rank's factors: four kinds of :class:`graphar.product.multiply.step.Multiply`."""

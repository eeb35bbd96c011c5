"""What multiplies one rank's factors: four kinds of :class:`graphar.product.multiply.step.Multiply`.

by_torch    ByTorch: torch's matmul; on the CPU the specification
own         Own: graphar's matmul of 16-bit operands
            Scaled: that of e4m3 operands
            Leaves: that in an order that depends on nothing but K: in the order of K, or in leaves
choice      which of them
"""

"""graphar's matmul, and matmuls whose result is summed over ranks or whose rows are gathered.

A Product (plan/work.py) is factors, rows, and what comes then. The binder, products.py, makes one of three plans of it:

    fused      one kernel multiplies and sums, or gathers and multiplies: fused.py
    Then       a matmul, and then the work that takes its products, a Sum, Parts or a Norm: then.py
    after      a gather, and then each rank's matmul: products.py; or a fused sum, and then each rank's norm

    multiply.py  what multiplies one rank's factors: four kinds (ByTorch, Own, Scaled, Leaves)
    gemm.py      graphar's matmul kernel
    operands.py  the tensors of a product, and of one matmul of a rank
"""

"""Sums, products, parts and errors of operators."""

import doctest
import importlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import Opaque, randn, rotation, rotations

from laplace_debias.operators import (
    BlockDiagonal,
    Dense,
    Diagonal,
    EigenKronecker,
    Identity,
    Kronecker,
    LowRankPlusDiagonal,
    ParameterLayout,
    Permuted,
    Product,
    SubMatrix,
    Sum,
    assume,
)

# Compositions keep the structure.

SIZE = 6


def eigen_kronecker(seed=0):
    return EigenKronecker(rotation(2), rotation(3), randn(2, 3, seed=seed))


def shared(seed):
    """Two operators with the same directions: the same tensors, not equal ones."""
    first = eigen_kronecker(seed)
    return first, EigenKronecker(first.U_G, first.U_A, randn(2, 3, seed=seed + 1))


STRUCTURED = {
    "identity": lambda: 0.7 * Identity(SIZE, torch.float64),
    "diagonal": lambda: Diagonal(randn(SIZE)),
    "dense": lambda: Dense(randn(SIZE, SIZE)),
    "kronecker": lambda: Kronecker(randn(2, 2), randn(3, 3)),
    "eigen-kronecker": eigen_kronecker,
    "axes": lambda: EigenKronecker(None, None, randn(2, 3)),
    "thin": lambda: EigenKronecker(rotation(2)[:, :1], rotation(3)[:, :1], randn(2, 2)),
    "groups": lambda: EigenKronecker(None, rotations(2, 3), randn(2, 1, 3)),
    "block-diagonal": lambda: BlockDiagonal(
        {"a": Dense(randn(2, 2)), "b": EigenKronecker(rotation(4), None, randn(4, 1))}
    ),
    "permuted": lambda: Permuted(eigen_kronecker(), torch.tensor([3, 0, 2, 5, 1, 4])),
    "low-rank": lambda: LowRankPlusDiagonal(randn(SIZE, 2), randn(2), randn(SIZE)),
    "low-rank-number": lambda: LowRankPlusDiagonal(randn(SIZE, 2), randn(2), 0.5),
}


@pytest.mark.parametrize("name", [name for name in STRUCTURED if name != "kronecker"])
def test_a_shifted_structure_keeps_its_type(name):
    A = STRUCTURED[name]()
    dense = A.to_dense()
    eye = torch.eye(SIZE, dtype=torch.float64)
    for shifted in (A + 0.1 * Identity(SIZE), 0.1 * Identity(SIZE) + A):
        assert type(shifted) is type(A)
        torch.testing.assert_close(shifted.to_dense(), dense + 0.1 * eye)
    torch.testing.assert_close((A - Identity(SIZE)).to_dense(), dense - eye)
    torch.testing.assert_close((Identity(SIZE) - A).to_dense(), eye - dense)


@pytest.mark.parametrize("name", STRUCTURED)
def test_a_scaled_structure_keeps_its_type_and_its_gradient(name):
    A = STRUCTURED[name]()
    scalar = torch.tensor(-1.5, dtype=torch.float64, requires_grad=True)
    scaled = scalar * A
    assert type(scaled) is type(A)
    torch.testing.assert_close(scaled.to_dense(), -1.5 * A.to_dense())
    (gradient,) = torch.autograd.grad(scaled.to_dense().sum(), scalar)
    torch.testing.assert_close(gradient, A.to_dense().sum())
    torch.testing.assert_close((A / 4).to_dense(), A.to_dense() / 4)


@pytest.mark.parametrize("diagonal", [torch.tensor(0.5), torch.rand(6) + 1])
def test_a_number_in_a_tensor_of_another_dtype_keeps_the_dtype_of_a_low_rank_matrix(diagonal):
    A = LowRankPlusDiagonal(randn(6, 2).float(), torch.tensor([1.0, 2.0]), diagonal)
    scalar = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    eye = torch.eye(6)
    for combined, expected in (
        (scalar * A, 0.3 * A.to_dense()),
        (A + scalar * Identity(6), A.to_dense() + 0.3 * eye),
        (A / torch.tensor(4), A.to_dense() / 4),
    ):
        assert isinstance(combined, LowRankPlusDiagonal)
        assert combined.dtype == torch.float32
        torch.testing.assert_close(combined.to_dense(), expected)
    (gradient,) = torch.autograd.grad((scalar * A).to_dense().sum(), scalar)
    torch.testing.assert_close(gradient.float(), A.to_dense().sum())


@pytest.mark.parametrize("combine", [torch.add, torch.matmul], ids=["sum", "product"])
@pytest.mark.parametrize(
    "pair",
    [
        lambda: (Diagonal(randn(6)), Diagonal(randn(6, seed=1))),
        lambda: (Diagonal(randn(6)), Dense(randn(6, 6))),
        lambda: (Dense(randn(6, 6)), Diagonal(randn(6))),
        lambda: shared(0),
        lambda: tuple(
            Permuted(Dense(randn(4, 4, seed=s)), torch.tensor([2, 0, 3, 1])) for s in (0, 1)
        ),
        lambda: tuple(
            BlockDiagonal({"a": Dense(randn(2, 2, seed=s)), "b": Diagonal(randn(3, seed=s))})
            for s in (0, 1)
        ),
    ],
)
def test_pairs_of_a_structure_keep_it(pair, combine):
    left, right = pair()
    combined = left + right if combine is torch.add else left @ right
    assert not isinstance(combined, Sum | Product)
    torch.testing.assert_close(combined.to_dense(), combine(left.to_dense(), right.to_dense()))


def test_sums_with_low_rank_keep_it():
    d = Diagonal(randn(SIZE, seed=3))
    for name in ("low-rank", "low-rank-number"):
        A = STRUCTURED[name]()
        for total in (A + d, d + A):
            assert isinstance(total, LowRankPlusDiagonal)
            torch.testing.assert_close(total.to_dense(), A.to_dense() + d.to_dense())


def test_kronecker_products_multiply_factor_by_factor():
    A, B = Kronecker(randn(2, 3), randn(2, 2)), Kronecker(randn(3, 2), randn(2, 4))
    assert isinstance(A @ B, Kronecker)
    torch.testing.assert_close((A @ B).to_dense(), A.to_dense() @ B.to_dense())
    unfit = Kronecker(randn(2, 2), randn(3, 3))
    assert isinstance(A @ unfit, Product)
    torch.testing.assert_close((A @ unfit).to_dense(), A.to_dense() @ unfit.to_dense())


def test_equal_directions_in_other_memory_are_not_taken_for_the_same():
    A = eigen_kronecker()
    B = EigenKronecker(A.U_G.clone(), A.U_A, A.magnitudes)
    assert isinstance(A + B, Sum)
    torch.testing.assert_close((A + B).to_dense(), 2 * A.to_dense())


@pytest.mark.parametrize("combine", [torch.add, torch.matmul], ids=["sum", "product"])
def test_axes_of_different_shapes_are_not_treated_as_equal(combine):
    row, column = (EigenKronecker(None, None, randn(*shape)) for shape in ((1, 6), (6, 1)))
    combined = row + column if combine is torch.add else row @ column
    torch.testing.assert_close(combined.to_dense(), combine(row.to_dense(), column.to_dense()))


def test_the_middle_of_a_product_decides_whether_it_is_positive():
    X, Y = Opaque(randn(3, 5)), Opaque(randn(4, 3))
    for sign, is_positive in ((1.0, True), (-1.0, False)):
        M = Diagonal(sign * randn(4).abs())
        product = X.T @ Y.T @ M @ Y @ X
        assert product.is_symmetric
        assert product.is_positive_semidefinite is is_positive


def test_an_opaque_operator_takes_one_multiple_of_the_identity():
    A = Opaque(randn(5, 5))
    operator = Identity(5) + A + 0.5 * Identity(5) - 2 * Identity(5)
    assert isinstance(operator, Sum)
    assert len(operator.terms) == 2
    torch.testing.assert_close(operator.to_dense(), A.matrix - 0.5 * torch.eye(5).double())


def test_blocks_of_a_shifted_block_diagonal_are_shifted():
    A = BlockDiagonal({"a": eigen_kronecker(), "b": Opaque(randn(2, 2))})
    shifted = A + 0.3 * Identity(8)
    assert isinstance(shifted.blocks["a"], EigenKronecker)
    torch.testing.assert_close(
        shifted.to_dense(), A.to_dense() + 0.3 * torch.eye(8, dtype=torch.float64)
    )


def test_slices_of_structures_keep_them():
    assert isinstance(Dense(randn(4, 5))[1:3, [0, 2]], Dense)
    A = Opaque(randn(3, 3))
    assert A[:, :] is A
    submatrix = A[1:, [0, 0]][:, [1]]
    assert isinstance(submatrix, SubMatrix)
    assert submatrix.operator is A


def test_blocks_by_name():
    A = BlockDiagonal({"a": Dense(randn(2, 2)), "b": Diagonal(randn(3))})
    torch.testing.assert_close(A["b", "b"].to_dense(), A.blocks["b"].to_dense())
    torch.testing.assert_close(A["a", "b"].to_dense(), torch.zeros(2, 3, dtype=torch.float64))
    torch.testing.assert_close(A["b"].to_dense(), A.to_dense()[2:])
    with pytest.raises(KeyError, match=r"no block 'c'. Use one of the names \['a', 'b'\]"):
        A["c", "c"]


# An identity without a dtype takes the dtype of the other operand.


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_an_identity_without_dtype_takes_that_of_the_other(dtype):
    eye = Identity(3)
    v = torch.arange(3).to(dtype)
    for operator in (eye, 2 * eye, -eye):
        assert (operator @ v).dtype == dtype
        assert (operator @ Diagonal(v)).dtype == dtype
        assert (Diagonal(v) + operator).dtype == dtype
        assert (operator - Diagonal(v)).dtype == dtype
    assert Kronecker(eye, Diagonal(v)).dtype == dtype
    assert eye.dtype == torch.get_default_dtype()
    assert eye.to(dtype).dtype == dtype


def test_a_given_dtype_is_kept():
    operator = Identity(3, torch.float32)
    with pytest.raises(ValueError, match=r"the same dtype.*float32.*float64|float64.*float32"):
        operator + Diagonal(randn(3))
    with pytest.raises(ValueError, match="float32"):
        operator @ randn(3)


@pytest.mark.parametrize("name", STRUCTURED)
def test_conversion(name):
    A = STRUCTURED[name]()
    single = A.to(torch.float32)
    assert type(single) is type(A)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.to_dense(), A.to_dense().float(), rtol=1e-5, atol=1e-5)
    assert A.to("meta").device.type == "meta"
    composed = A[torch.randperm(SIZE)][:3].to(torch.float32)
    assert (composed @ torch.ones(SIZE)).dtype == torch.float32


@pytest.mark.parametrize("index", [range(5), range(-4, 0), range(2, -6, -1)])
def test_ranges_beyond_the_operator_are_refused(index):
    for A in (Diagonal(randn(3)), Opaque(randn(3, 3))):
        with pytest.raises(IndexError, match=r"out of bounds for.* size 3"):
            A[index, :]


@pytest.mark.parametrize("index", [range(-3, 0), range(2, -1, -1), range(1, 3), range(1, 1)])
def test_ranges_are_counted_as_pythons_indices_are(index):
    matrix = randn(3, 3)
    expected = matrix[[i % 3 for i in index]]
    torch.testing.assert_close(Opaque(matrix)[index, :].to_dense(), expected)


def test_blocks_without_a_dtype_take_that_of_the_others():
    A = BlockDiagonal({"a": Identity(2), "b": Dense(randn(2, 2)), "c": 2 * Identity(1)})
    assert A.dtype == torch.float64
    assert (A @ torch.ones(5, dtype=torch.float64)).dtype == torch.float64
    assert A.blocks["c"].dtype == torch.float64
    with pytest.raises(ValueError, match="the same dtype"):
        BlockDiagonal({"a": Diagonal(torch.ones(2)), "b": Dense(randn(2, 2))})


def test_an_operator_that_is_not_made_of_tensors_says_how_it_is_converted():
    with pytest.raises(TypeError, match="Convert the object that it was built from"):
        Opaque(randn(2, 2)).to(torch.float32)


def test_gradients_flow_through_products():
    def product(magnitudes):
        A = 2 * (EigenKronecker(rotation(2), None, magnitudes) + 0.1 * Identity(6))
        return (A @ Opaque(randn(6, 6)) - A) @ randn(6)

    assert torch.autograd.gradcheck(product, randn(2, 3).requires_grad_())


# Named parameters.

SHAPES = {"weight": (2, 3), "bias": (2,), "scale": ()}
LAYOUT = ParameterLayout(tuple(SHAPES), tuple(SHAPES.values()))


def parameters(*columns):
    return {name: randn(*shape, *columns, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}


@pytest.mark.parametrize("columns", [(), (4,), (0,)])
def test_parameters_in_parameters_out(columns):
    A = assume(Opaque(randn(9, 9) + randn(9, 9).T, LAYOUT), symmetric=True)
    named = parameters(*columns)
    flat = torch.cat(
        [
            tensor.flatten(0, len(SHAPES[k]) - 1) if SHAPES[k] else tensor[None]
            for k, tensor in named.items()
        ]
    )
    expected = A.operator.matrix @ flat
    shuffled = dict(reversed(named.items()))
    for operator in (A, A + 0 * Identity(9), A @ Identity(9), 1.0 * A):
        product = operator @ shuffled
        assert list(product) == list(SHAPES)
        assert all(product[k].shape == (*SHAPES[k], *columns) for k in SHAPES)
        torch.testing.assert_close(product["weight"].flatten(0, 1), expected[:6])
        torch.testing.assert_close(product["bias"], expected[6:8])
        torch.testing.assert_close(product["scale"], expected[8])
    in_order = A @ list(named.values())
    assert isinstance(in_order, list)
    torch.testing.assert_close(in_order[1], product["bias"])


def test_rows_that_belong_to_no_parameters_come_out_as_a_tensor():
    J = Opaque(randn(4, 9), LAYOUT)
    flat = LAYOUT.flatten(parameters())
    torch.testing.assert_close(J @ parameters(), J.matrix @ flat)
    # The rows of JᵀJ are the columns of J.
    gram = LAYOUT.flatten((J.T @ J) @ parameters())
    torch.testing.assert_close(gram, J.matrix.T @ (J.matrix @ flat))


def test_names_are_indices():
    A = assume(Opaque(randn(9, 9) + randn(9, 9).T, LAYOUT), symmetric=True)
    torch.testing.assert_close(A["bias", "weight"].to_dense(), A.operator.matrix[6:8, :6])
    with pytest.raises(KeyError, match=r"no parameter 'gain'. Use one of the names"):
        A["gain", "bias"]
    with pytest.raises(KeyError, match="has no layout with names for the entries"):
        Dense(randn(2, 2))["bias", "bias"]


@pytest.mark.parametrize("rows", [4, 9])
def test_names_do_not_stand_for_rows_that_belong_to_no_parameters(rows):
    J = Opaque(randn(rows, 9), LAYOUT)
    torch.testing.assert_close(J[:, "bias"].to_dense(), J.matrix[:, 6:8])
    for index in ["bias", ("bias", slice(None)), ("bias", 0)]:
        with pytest.raises(KeyError, match=r"do not correspond to parameters"):
            J[index]


@pytest.mark.usefixtures("unchecked")
def test_wrong_parameters_are_named():
    A = Opaque(randn(9, 9), LAYOUT)
    named = parameters()
    with pytest.raises(
        ValueError, match=r"\['bias'\] are missing, and \['gain'\] are not in the layout"
    ):
        A @ {"weight": named["weight"], "scale": named["scale"], "gain": named["bias"]}
    with pytest.raises(ValueError, match="There are 2 tensors for 3 parameters"):
        A @ [named["weight"], named["bias"]]
    with pytest.raises(ValueError, match=r"weight has shape \(3, 2\), expected \(2, 3\)"):
        A @ {**named, "weight": named["weight"].T}
    with pytest.raises(ValueError, match="with the same k"):
        A @ {**parameters(4), "bias": randn(2, 5)}
    with pytest.raises(ValueError, match="differ in dtype or device"):
        A @ {**named, "bias": named["bias"].float()}
    with pytest.raises(TypeError, match="has no parameter layout"):
        Dense(randn(9, 9)) @ named


def test_operators_on_other_parameters_cannot_be_added():
    layout = ParameterLayout(("a",), ((9,),))
    with pytest.raises(ValueError, match=r"\['weight', 'bias', 'scale'\]"):
        Opaque(randn(9, 9), LAYOUT) + Opaque(randn(9, 9), layout)


def test_block_diagonal_with_layout():
    blocks = BlockDiagonal({"weight": Dense(randn(6, 6)), "rest": Diagonal(randn(3))})
    A = Permuted(blocks, layout=LAYOUT)
    for operator in (A, 2 * A, A + A, A + 0.1 * Identity(9)):
        assert operator.layout == LAYOUT
    product = A @ parameters()
    expected = A.to_dense() @ LAYOUT.flatten(parameters())
    torch.testing.assert_close(LAYOUT.flatten(product), expected)
    with pytest.raises(
        ValueError, match="The layout has 9 parameters, but the operator has 2 rows"
    ):
        Permuted(Diagonal(randn(2)), layout=LAYOUT)


# Errors.


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Diagonal(randn(2, 2)), ValueError, "use Dense for a matrix"),
        (lambda: Dense(randn(2)), ValueError, "use Diagonal for a vector"),
        (lambda: Dense(torch.ones(2, 2).long()), ValueError, "real floating"),
        (lambda: Identity(-1), ValueError, "number of rows is -1"),
        (lambda: Identity(2, torch.int64), TypeError, "real floating"),
        (lambda: EigenKronecker(None, None, torch.ones(2, 2).long()), ValueError, "real floating"),
        (
            lambda: EigenKronecker(None, None, torch.ones(2, 2, dtype=torch.complex64)),
            ValueError,
            "real floating",
        ),
        (
            lambda: LowRankPlusDiagonal(torch.ones(2, 1).long(), torch.ones(1).long(), 0.5),
            ValueError,
            "real floating",
        ),
        (Kronecker, ValueError, "at least one factor"),
        (lambda: Kronecker(randn(2, 2), randn(2, 2).float()), ValueError, "the same dtype"),
        (lambda: BlockDiagonal({}), ValueError, "at least one block"),
        (
            lambda: BlockDiagonal({"a": randn(2, 2)}),
            TypeError,
            "the block 'a' must be LinearOperator, got Tensor",
        ),
        (lambda: assume(randn(2, 2)), TypeError, "must be LinearOperator, got Tensor"),
        (lambda: BlockDiagonal({"a": Dense(randn(2, 3))}), ValueError, "'a' has shape .* square"),
        (
            lambda: BlockDiagonal({"a": Identity(2, torch.float32), "b": Diagonal(randn(2))}),
            ValueError,
            "the same dtype",
        ),
        (
            lambda: EigenKronecker(randn(2, 2), None, randn(3, 2)),
            ValueError,
            r"U_G of shape \(3, 3",
        ),
        (
            lambda: EigenKronecker(None, randn(2, 3), randn(3, 3)),
            ValueError,
            r"U_A of shape \(3, 3",
        ),
        (
            lambda: EigenKronecker(randn(4, 2), None, randn(2, 2)),
            ValueError,
            "a thin U_. with 1 columns",
        ),
        (
            lambda: EigenKronecker(None, randn(4, 2), randn(2, 4)),
            ValueError,
            "a thin U_. with 3 columns",
        ),
        (lambda: EigenKronecker(randn(2, 4, 1), None, randn(3, 2, 2)), ValueError, r"\(3, 2, 2\)"),
        (lambda: EigenKronecker(None, None, randn(3)), ValueError, r"\[d_out, d_in\]"),
        (lambda: EigenKronecker(None, None, randn(1, 1, 2, 2)), ValueError, r"\[g, d_out, d_in\]"),
        (
            lambda: EigenKronecker(randn(2, 2), None, randn(4, 2, 2)),
            ValueError,
            r"U_G of shape \(4, 2, 2",
        ),
        (
            lambda: EigenKronecker(randn(2, 2).float(), None, randn(2, 3)),
            ValueError,
            "have the same dtype",
        ),
        (lambda: LowRankPlusDiagonal(randn(3, 2), randn(3), 1.0), ValueError, "do not match U"),
        (
            lambda: LowRankPlusDiagonal(randn(3, 2), randn(2), randn(2)),
            ValueError,
            "one number, or",
        ),
        (
            lambda: LowRankPlusDiagonal(randn(3, 2), randn(2).float(), 1.0),
            ValueError,
            "have the same dtype",
        ),
        (lambda: assume(Dense(randn(2, 3)), symmetric=True), ValueError, "square"),
        (lambda: ParameterLayout(("a",), ()), ValueError, "Pass one name per shape"),
        (lambda: ParameterLayout(("a", "a"), ((), ())), ValueError, "not unique"),
        (lambda: Diagonal(randn(2)) + 0.1, TypeError, r"c \* Identity\(n\)"),
        (lambda: randn(2, 2) + Diagonal(randn(2)), TypeError, r"Dense\(matrix\)"),
        (lambda: randn(2, 2) - Diagonal(randn(2)), TypeError, r"Dense\(matrix\)"),
        (lambda: np.ones((2, 2)) @ Diagonal(randn(2)), TypeError, "to_scipy"),
        (
            lambda: Diagonal(randn(2)) + Diagonal(randn(3)),
            ValueError,
            "Use operators of the same shape",
        ),
        (lambda: Diagonal(randn(2)) * Diagonal(randn(2)), TypeError, "Use `@` for products"),
        (lambda: Diagonal(randn(2)) * randn(2), TypeError, "Use `@` for products"),
        (lambda: 1j * Diagonal(randn(2)), TypeError, "real number"),
        (lambda: "a" * Diagonal(randn(2)), TypeError, "real number"),
        (lambda: Diagonal(randn(2))[0, 0, 0], IndexError, "two indices"),
        (lambda: Diagonal(randn(2))[0.5], TypeError, "Use an integer"),
        (lambda: Diagonal(randn(2))[[0.5]], TypeError, "single list, tensor or array of integers"),
        (lambda: Diagonal(randn(2))[torch.tensor([True])], IndexError, "mask"),
        (lambda: Diagonal(randn(2))[[[0]]], TypeError, "a single list"),
        (lambda: Permuted(Dense(randn(2, 3))), ValueError, "Only a square operator"),
        (lambda: Permuted(Dense(randn(2, 2)), torch.tensor([0, 0])), ValueError, "from 0 to 1"),
        (
            lambda: Permuted(Dense(randn(2, 2)), layout=ParameterLayout(("w",), ((3,),))),
            ValueError,
            "The layout has 3 parameters",
        ),
        (lambda: Diagonal(randn(2).bfloat16()).to_scipy(), TypeError, "torch.float32"),
        (lambda: Diagonal(randn(2)).to_scipy() @ (1j * np.ones(2)), TypeError, "operator is real"),
    ],
)
def test_errors_name_the_remedy(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_operators_print_what_they_are():
    text = repr(0.5 * (Opaque(randn(2, 3))))
    assert text == "Scaled(shape=(2, 3), dtype=torch.float64, device=cpu)"


@pytest.mark.parametrize("module", ["base", "structures.wrappers"])
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(f"laplace_debias.operators.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


# Random compositions.

LEAVES = st.sampled_from(sorted(STRUCTURED))
ORDERS = st.permutations(range(SIZE))
STEPS = st.one_of(
    st.tuples(st.sampled_from(["plus", "minus", "times", "left"]), LEAVES),
    st.tuples(st.just("scale"), st.floats(-2, 2)),
    st.tuples(st.just("permute"), ORDERS),
    st.tuples(st.just("select"), st.tuples(ORDERS, ORDERS)),
    st.tuples(st.just("transpose"), st.none()),
)


def step(operator, dense, kind, argument):
    """Apply one step of a composition to the operator and to its matrix."""
    if kind in ("plus", "minus", "times", "left"):
        second = STRUCTURED[argument]()
        matrix = second.to_dense()
        return {
            "plus": lambda: (operator + second, dense + matrix),
            "minus": lambda: (operator - second, dense - matrix),
            "times": lambda: (operator @ second, dense @ matrix),
            "left": lambda: (second @ operator, matrix @ dense),
        }[kind]()
    return {
        "scale": lambda: (argument * operator, argument * dense),
        "permute": lambda: (operator[argument, :], dense[argument]),
        "select": lambda: (operator[argument], dense[argument[0]][:, argument[1]]),
        "transpose": lambda: (operator.T, dense.T),
    }[kind]()


@settings(max_examples=150, deadline=None)
@given(LEAVES, st.lists(STEPS, min_size=1, max_size=5))
def test_random_compositions_equal_their_matrices(leaf, steps):
    operator = STRUCTURED[leaf]()
    dense = operator.to_dense()
    for kind, argument in steps:
        operator, dense = step(operator, dense, kind, argument)
    scale = max(1.0, dense.abs().max().item())
    close = {"rtol": 0, "atol": 1e-10 * scale}
    torch.testing.assert_close(operator.to_dense(), dense, **close)
    torch.testing.assert_close(operator.T.to_dense(), dense.T, **close)
    if operator.is_symmetric:
        torch.testing.assert_close(dense, dense.T, **close)
    if operator.is_positive_semidefinite:
        assert torch.linalg.eigvalsh((dense + dense.T) / 2).min() > -1e-10 * scale

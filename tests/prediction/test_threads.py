"""Four threads get the same answers as one thread, on one model and on several."""

import copy
import gc
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import chain

import pytest
import rank_tasks
import torch
from spectra import generator as seed
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.curvature import GGN, KFAC, EmpiricalFisher, Fisher, Hessian, Jacobian
from laplace_debias.curvature.network.calling import quiet
from laplace_debias.system.threads import Lock, SharedSetting

THREADS = 4
X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(24) % 3
DATA = [(X[:12], Y[:12]), (X[12:], Y[12:])]


def at_once(calls, rounds=1):
    """The results of `rounds` runs of all calls, from four threads that start together."""
    barrier = threading.Barrier(THREADS)
    jobs = [call for _ in range(rounds) for call in calls]

    def work(number):
        barrier.wait()
        return [(i, jobs[i]()) for i in range(number, len(jobs), THREADS)]

    with ThreadPoolExecutor(THREADS) as pool:
        results = dict(chain.from_iterable(pool.map(work, range(THREADS))))
    return [results[i] for i in range(len(jobs))]


def assert_as_alone(calls, rounds=1):
    expected = [call() for call in calls]
    results = at_once(calls, rounds)
    assert len(results) == rounds * len(calls)
    for i, result in enumerate(results):
        # To rounding: which kernel of attention is taken may depend on the neighbours.
        torch.testing.assert_close(result, expected[i % len(calls)], rtol=1e-10, atol=1e-12)


def ready(build):
    """Return a function that copies a built network.

    Building draws from the global generator, which threads share.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
    return lambda: copy.deepcopy(model)


@ready
def mlp():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()


@ready
def conv():
    return (
        nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3)
        )
        .double()
        .eval()
    )


@ready
def transformer():
    layer = nn.TransformerEncoderLayer(2, 1, 3, dropout=0.0, batch_first=True)
    return (
        nn.Sequential(nn.Unflatten(1, (3, 2)), layer, nn.Flatten(), nn.Linear(6, 3)).double().eval()
    )


@ready
def recurrent():

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(3, 2, batch_first=True)
            self.head = nn.Linear(2, 3)

        def forward(self, x):
            return self.head(self.rnn(x.unflatten(1, (2, 3)))[0][:, -1])

    return Last().double().eval()


NETWORKS = {"mlp": mlp, "conv": conv, "transformer": transformer}


def predict(la, method, number=0, rows=slice(None)):
    samples = None if method in ("glm", "map") else 17
    return la.predict(X[rows], method, samples, seed(number)).probs


def fitted(make=mlp, **options):
    return Laplace(make(), **options).fit_batches(DATA)


def fit(make, mode="full", **options):
    la = Laplace(make(), **options)
    if mode == "full":
        la.fit_batches(DATA)
    else:
        la.fit(DATA, mode, num_data=24)
    # Not the directions, which are free where curvatures coincide.
    return torch.cat(
        [la.functional(X, diagonal=True)[1].flatten(), la.log_marginal_likelihood()[None]]
    )


@pytest.mark.parametrize("network", NETWORKS)
def test_predictions_of_one_object(network):
    la = fitted(NETWORKS[network], backend="hooks")
    calls = [partial(predict, la, "glm-mc", number) for number in range(4)]
    calls += [partial(predict, la, method) for method in ("glm", "nn", "map")]
    assert_as_alone(calls, 6)


OTHER_CURVATURES = ("diag", "lowrank", "full")


@pytest.mark.parametrize("backend", ["backpack", "hooks"])
def test_fits(backend):
    shared_model = conv()
    calls = [
        partial(fit, make, mode, curvature=curvature, backend=backend)
        for make in (conv, lambda: shared_model)
        for curvature, mode in (("kfac", "full"), ("kfac", "crossfit"), ("ekfac", "debiased"))
    ]
    calls += [
        partial(fit, mlp, curvature=curvature, backend=backend) for curvature in OTHER_CURVATURES
    ]
    calls += [partial(fit, mlp, "crossfit", curvature="full", backend=backend)]
    assert_as_alone(calls, 2 if backend == "backpack" else 1)


def test_everything_else_of_one_object():
    la = fitted(transformer)
    loader = DataLoader(TensorDataset(X, Y), batch_size=12, shuffle=True)

    def evaluate(method):
        report = la.evaluate(loader, method=method, samples=9, generator=seed(2))
        return torch.tensor(list(report.values()), dtype=torch.float64)

    calls = [
        lambda: la.functional(X)[1],
        lambda: la.sample(3, seed(1)),
        la.log_marginal_likelihood,
        lambda: la.posterior.precision @ torch.ones(len(la.mean), dtype=torch.float64),
        partial(evaluate, "glm-mc"),
        partial(evaluate, "nn"),
        partial(predict, la, "glm-mc", 1),
        partial(fit, conv, backend="backpack"),
    ]
    assert_as_alone(calls, 2)


def test_objects_are_tuned_saved_and_loaded_at_once(tmp_path):
    networks = [mlp() for _ in range(4)]
    for number, model in enumerate(networks):
        model[0].weight.data.mul_(1 + number)

    def tuned(model):
        la = Laplace(model, backend="backpack").fit_batches(DATA)
        la.tune(DATA, grid=[0.1, 1.0, 10.0])
        la.save(path := tmp_path / f"{id(model)}-{threading.get_ident()}.safetensors")
        return Laplace.load(path, model).predict(X).probs

    assert_as_alone([partial(tuned, model) for model in networks], 2)


def products(A):
    vectors = torch.randn(A.shape[1], 3, generator=seed(4), dtype=torch.float64)
    return [lambda: A @ vectors[:, 0], lambda: A @ vectors]


OPERATORS = [
    (Hessian, recurrent, 2**20),
    (Hessian, mlp, 0),
    (GGN, recurrent, 0),
    (GGN, mlp, 2**20),
    (Fisher, mlp, 2**20),
    (EmpiricalFisher, mlp, 0),
    (Jacobian, mlp, 2**20),
    (KFAC, mlp, None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "make", "bound"), OPERATORS)
def test_products_with_one_operator(kind, make, bound):
    """Not multiplied before: the threads come to make and to keep the same batches."""
    arguments = () if kind is Jacobian else (nn.CrossEntropyLoss(),)
    options = {} if kind is KFAC else {"memory_bound": bound}
    model = make()
    alone = kind(model, *arguments, DATA, **options)
    shared = kind(model, *arguments, DATA, **options)
    expected = [call() for call in products(alone)]
    for i, result in enumerate(at_once(products(shared), 4)):
        torch.testing.assert_close(result, expected[i % 2], rtol=1e-10, atol=1e-12)


def attention_kernels():
    """The kernels that attention may use just now."""
    kinds = {kind: getattr(torch.backends.cuda, f"{kind}_sdp_enabled") for kind in KERNELS}
    return {kind for kind, is_enabled in kinds.items() if is_enabled()}


KERNELS = ("flash", "mem_efficient", "math")


def settings():
    return (
        torch.backends.mha.get_fastpath_enabled(),
        attention_kernels(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        list(warnings.filters),
    )


def test_settings_of_the_process_are_left_as_they_were():
    gc.collect()  # Passes that other tests have abandoned end here, with their settings.
    settings_before = settings()
    las = [fitted(transformer), fitted(mlp)]
    calls = [partial(predict, la, m, 1) for la in las for m in ("glm-mc", "nn", "glm", "map")]

    def product():
        A = Hessian(recurrent(), nn.CrossEntropyLoss(), DATA[:1])
        return A @ torch.ones(A.shape[1], dtype=torch.float64)

    at_once([*(calls * 3), product, *calls, product])
    with quiet():
        pass  # A `catch_warnings` of torch in another thread may have added the filters again.
    assert settings() == settings_before


def test_filters_of_warnings_that_are_set_meanwhile_stay():
    """Another thread, or an abandoned pass, may hold the setting while a user changes filters."""
    filters_before = list(warnings.filters)
    users_filter = ("error", None, UnicodeWarning, None, 0)
    equal_filter = ("ignore", None, FutureWarning, None, 0)
    manager = quiet()
    warnings.filters.insert(0, equal_filter)
    try:
        with manager:
            warnings.warn("torch's", FutureWarning, stacklevel=1)
            warnings.filters.insert(0, users_filter)
        assert warnings.filters == [users_filter, equal_filter, *filters_before]
    finally:
        warnings.filters[:] = filters_before


def test_filters_that_another_thread_adds_again_are_removed_by_the_next_call():
    filters_before = list(warnings.filters)
    catching = warnings.catch_warnings()
    try:
        with quiet():
            catching.__enter__()
        catching.__exit__(None, None, None)
        assert warnings.filters != filters_before
        with quiet():
            pass
        assert warnings.filters == filters_before
    finally:
        warnings.filters[:] = filters_before


def test_overlapping_holders_of_a_setting_restore_it():
    """If A enters, B enters, A leaves and B leaves, the setting is as before A."""
    log = []

    class Manager:
        def __enter__(self):
            log.append("set")

        def __exit__(self, *_):
            log.append("restored")

    setting = SharedSetting(Manager)
    arrived = threading.Event()
    may_leave = threading.Event()

    def hold_setting():
        with setting():
            arrived.set()
            may_leave.wait(10)

    thread = threading.Thread(target=hold_setting)
    with setting(), setting():
        thread.start()
        assert arrived.wait(10)
    assert log == ["set"]
    may_leave.set()
    thread.join()
    assert log == ["set", "restored"]


def test_a_context_that_another_thread_leaves_is_that_of_the_thread_that_entered_it():
    setting = SharedSetting(nullcontext)
    context = setting()
    thread = threading.Thread(target=context.__enter__)
    thread.start()
    thread.join()
    assert not setting.is_made_by_this_thread()
    context.__exit__(None, None, None)
    with setting():
        assert setting.is_made_by_this_thread()
    assert not setting.is_made_by_this_thread()


def test_another_thread_may_leave_attention_as_it_was():
    """`sdpa_kernel` alone insists on being left by the thread that came."""
    kernels_before = attention_kernels()
    setting = SharedSetting(lambda: sdpa_kernel(SDPBackend.MATH))
    first = setting()
    second = setting()
    first.__enter__()
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join()
    first.__exit__(None, None, None)
    assert attention_kernels() == {"math"}
    thread = threading.Thread(target=second.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert attention_kernels() == kernels_before


def test_a_failing_prediction_lets_the_next_one_in():
    class Fails(nn.Module):
        broken = False

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            if self.broken:
                raise OSError("gone")
            return self.layer(x)

    model = Fails().double().eval()
    la = Laplace(model).fit_batches(DATA)
    intact = fitted()
    model.broken = True
    settings_before = settings()
    with pytest.raises(OSError, match="gone"):
        predict(la, "glm-mc")
    assert settings() == settings_before
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(predict, intact, "glm-mc").result(30).isfinite().all()


def test_operators_with_locks_can_still_be_copied_and_pickled():
    lock = Lock()
    with lock:
        copied = copy.deepcopy(lock)
        unpickled = pickle.loads(pickle.dumps(lock))
        for lock_copy in (copied, unpickled):
            assert lock_copy._lock.acquire(blocking=False)
    A = GGN(mlp(), nn.CrossEntropyLoss(), DATA)
    ones = torch.ones(A.shape[1], dtype=torch.float64)
    torch.testing.assert_close(copy.deepcopy(A) @ ones, A @ ones)


def test_a_fit_beside_readers_is_seen_before_or_after():
    """Never the likelihood of one fit with the determinant of another."""
    first = DATA[:1]
    second = DATA[1:]
    la = Laplace(mlp()).fit_batches(first, num_data=24)
    allowed = [float(la.log_marginal_likelihood())]
    la.fit_batches(second, num_data=24)
    allowed.append(float(la.log_marginal_likelihood()))
    assert abs(allowed[0] - allowed[1]) > 1e-3
    fits_are_done = threading.Event()

    def read():
        values = set()
        while not fits_are_done.is_set():
            values.add(float(la.log_marginal_likelihood()))
        return values

    with ThreadPoolExecutor(THREADS) as pool:
        readers = [pool.submit(read) for _ in range(THREADS - 1)]
        try:
            for _ in range(4):
                la.fit_batches(first, num_data=24)
                la.fit_batches(second, num_data=24)
        finally:
            fits_are_done.set()
        for value in set().union(*(reader.result(30) for reader in readers)):
            assert min(abs(value - a) for a in allowed) < 1e-9


class UsesOfLiveParameters(TorchDispatchMode):
    """Record the functions other than `detach` that use a model's own parameters under autograd.

    Such a function adds a node to the graph. While torch does so, it holds the parameter's lock and
    may wait for the GIL, and a thread that holds the GIL may wait for the parameter.
    """

    def __init__(self, model):
        super().__init__()
        self.parameters = list(model.parameters())
        self.functions = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_live = any(x is p for x in tree_leaves((args, kwargs)) for p in self.parameters)
        if torch.is_grad_enabled() and is_live and function != torch.ops.aten.detach.default:
            self.functions.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("make", "dtype"), [(conv, torch.float64), (mlp, torch.bfloat16)])
def test_no_graph_leads_to_a_parameter_that_threads_share(tmp_path, make, dtype):
    """It could freeze the process (torch 2.15)."""
    model = make().to(dtype)
    x = X.to(dtype)
    data = [(inputs.to(dtype), labels) for inputs, labels in DATA]
    with UsesOfLiveParameters(model) as uses:
        la = Laplace(model).fit_batches(data)
        la.tune(data, grid=[1.0, 10.0])
        for method in ("glm", "glm-mc", "nn", "map"):
            la.predict(x, method, samples=None if method in ("glm", "map") else 3)
        la.save(tmp_path / "posterior")
        Laplace.load(tmp_path / "posterior", model).functional(x)
        Laplace(model, params="last_layer", curvature="full").fit_batches(data)
        A = GGN(model, nn.CrossEntropyLoss(), data)
        for _ in range(2):
            A @ torch.ones(A.shape[1], dtype=A.dtype)
    assert uses.functions == []


@pytest.mark.slow
def test_threads_that_fit_one_model_do_not_freeze(processes):
    """Before parameters were detached they froze in each of seven runs of eight seconds."""
    assert min(*processes.run(1, rank_tasks.fit_in_threads, THREADS, 8)[0]) > 0

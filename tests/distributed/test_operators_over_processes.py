"""Operators on data that several processes share are those of one process."""

import pytest
import rank_tasks as tasks
import torch


@pytest.mark.slow
@pytest.mark.parametrize("name", [*tasks.OPERATORS, *tasks.WEIGHTED_OPERATORS])
def test_products_and_estimates(processes, name):
    expected = tasks.products(0, name)
    for results in processes.run(3, tasks.products, name):
        assert isinstance(results, dict), results
        for key, value in expected.items():
            torch.testing.assert_close(
                torch.as_tensor(results[key]), torch.as_tensor(value), rtol=1e-11, atol=1e-13
            )


@pytest.mark.slow
def test_a_quadratic(processes):
    expected = tasks.quadratic(0)
    for results in processes.run(2, tasks.quadratic):
        for key, value in expected.items():
            torch.testing.assert_close(results[key], value, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["hessian", "ggn"])
def test_vectors_that_differ_between_processes_are_refused(processes, name):
    for messages in processes.run(2, tasks.products_with_other_vectors, name):
        assert len(messages) == 2
        for message in messages:
            assert "differs between the ranks: rank 1 has one with other entries" in message
            assert "For generators, use the same seed" in message


def test_what_is_not_there_says_so(processes):
    for kind, message in processes.run(2, tasks.refused_operator):
        assert kind == "NotImplementedError"
        assert "Jacobian" in message
        assert "laplace_debias.alone()" in message

"""The paper's experiments: `python -m examples.paper NAME --config configs/paper/NAME.yaml`.

Reference:
    Tatzel et al. (2025), Debiasing Mini-Batch Quadratics for Applications in Deep Learning.
"""

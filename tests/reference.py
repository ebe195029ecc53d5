"""Plain NumPy twins of the optimizers, written from the papers.

Each function returns a `step(weights, gradient)` that remembers its moments and
returns the new weights; everything is float64.
"""

import numpy as np


def radam(
    learning_rate=0.001,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-7,
    amsgrad=False,
    sma_threshold=5.0,
    total_steps=0,
    warmup_proportion=0.1,
    min_learning_rate=0.0,
    degenerate_to_sgd=True,
    weight_decay=0.0,
):
    """Algorithm 2 of arXiv:1908.03265, with decoupled weight decay.

    Epsilon, amsgrad, the warm-up and the decay of the rate are not in the
    paper; they are those of TensorFlow Addons.
    """
    t, m, v, v_max = 0, 0.0, 0.0, 0.0
    rho_inf = 2 / (1 - beta_2) - 1

    def step(w, g):
        nonlocal t, m, v, v_max
        t += 1
        alpha = learning_rate
        if total_steps:
            warm = total_steps * warmup_proportion
            if t <= warm:
                alpha *= t / warm
            else:
                done = min(1, (t - warm) / (total_steps - warm))
                alpha = (1 - done) * alpha + done * min_learning_rate
        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g**2
        v_max = np.maximum(v_max, v)
        m_hat = m / (1 - beta_1**t)
        rho = rho_inf - 2 * t * beta_2**t / (1 - beta_2**t)
        if rho_inf > sma_threshold and rho >= sma_threshold:
            r = np.sqrt(
                ((rho - 4) * (rho - 2) * rho_inf)
                / ((rho_inf - 4) * (rho_inf - 2) * rho)
            )
            v_hat = (v_max if amsgrad else v) / (1 - beta_2**t)
            move = r * m_hat / (np.sqrt(v_hat) + epsilon)
        elif degenerate_to_sgd:
            move = m_hat
        else:
            return w
        return w - alpha * (move + weight_decay * w)

    return step


def adam(
    learning_rate=0.001,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-7,
    amsgrad=False,
    decay=0.0,
    weight_decay=0.0,
):
    """Arxiv:1412.6980, the order of computation at the end of section 2."""
    t, m, v, v_max = 0, 0.0, 0.0, 0.0

    def step(w, g):
        nonlocal t, m, v, v_max
        alpha = learning_rate / (1 + decay * t)
        t += 1
        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g**2
        v_max = np.maximum(v_max, v)
        alpha_t = alpha * np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
        root = np.sqrt(v_max if amsgrad else v)
        return w - alpha_t * m / (root + epsilon) - alpha * weight_decay * w

    return step


def sgd(learning_rate, momentum=0.0, weight_decay=0.0):
    """Momentum as Keras has it, with decoupled weight decay."""
    velocity = 0.0

    def step(w, g):
        nonlocal velocity
        velocity = momentum * velocity - learning_rate * g
        return w - learning_rate * weight_decay * w + velocity

    return step


def lookahead(inner_step, start, sync_period=5, slow_step_size=0.5):
    """Algorithm 1 of arXiv:1907.08610."""
    t, slow = 0, start

    def step(w, g):
        nonlocal t, slow
        t += 1
        w = inner_step(w, g)
        if t % sync_period == 0:
            slow = slow + slow_step_size * (w - slow)
            w = slow
        return w

    return step

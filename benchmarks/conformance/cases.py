"""The comparisons: our algorithm, their implementation, and what it shows. Each row is one command."""

import shlex
from typing import NamedTuple


class Case(NamedTuple):
    """One `lamina conform` command, to be run in this folder."""

    package: str  # as pip names it
    what: str  # their implementation, in words
    command: str  # the words after `lamina conform`

    @property
    def words(self):
        return shlex.split(self.command)


ADAM = "--set v_init=0 --set bias_correction=true --set beta2=0.999 --set tau=1e-8"
STRATEGY = "flwr.serverapp.strategy"
CASES = [
    Case("torch", "Adam, on the server", f"fedadam torch.optim:Adam {ADAM}"),
    Case(
        "torch",
        "Adam against the paper's FedAdam",
        "fedadam torch.optim:Adam --theirs betas=[0.9,0.99] --theirs eps=1e-3",
    ),
    Case(
        "torch", "AMSGrad, on the server", f"fedadam torch.optim:Adam --theirs amsgrad=true --set amsgrad=true {ADAM}"
    ),
    Case("torch", "NAdam, on the server", f"fedadam torch.optim:NAdam {ADAM}"),
    Case("torch", "AdamW, on the clients", "localadamw torch.optim:AdamW"),
    Case(
        "torch",
        "AdamW with state kept between rounds",
        "diloco torch.optim:AdamW --theirs betas=[0.9,0.95] --theirs weight_decay=0.1",
    ),
    Case("torch", "SGD with momentum, on the server", "fedavgm torch.optim:SGD --theirs momentum=0.9"),
    Case(
        "torch", "SGD with momentum, on the clients", "fednova torch.optim:SGD --theirs momentum=0.9 --set momentum=0.9"
    ),
    Case(
        "torch",
        "SGD with damped momentum",
        "fedavgm torch.optim:SGD --theirs momentum=0.9 --theirs dampening=0.9 --set damped=true",
    ),
    Case(
        "torch",
        "SGD with Nesterov momentum",
        "diloco torch.optim:SGD --half server --theirs momentum=0.9 --theirs nesterov=true",
    ),
    Case("torch", "Adagrad, on the server", "fedadagrad torch.optim:Adagrad --theirs eps=1e-3 --set v_init=0"),
    Case(
        "torch",
        "Muon and AdamW, without Muon's rounding to bfloat16",
        "localmuon torch_targets:muon --theirs in_float64=true --tolerance 1e-6",
    ),
    Case(
        "torch",
        "Muon and AdamW, against ours in bfloat16",
        "localmuon torch_targets:muon --set arithmetic=bfloat16 --tolerance 1e-3",
    ),
    Case("flwr", "FedAvg, weighted by examples", f"fedavg {STRATEGY}:FedAvg --set weighting=examples"),
    Case("flwr", "FedAvgM", f"fedavgm {STRATEGY}:FedAvgM --theirs server_momentum=0.9"),
    Case("flwr", "FedAvgM, with its defaults", f"fedavgm {STRATEGY}:FedAvgM"),
    Case("flwr", "FedAdam", f"fedadam {STRATEGY}:FedAdam --theirs eta=0.01"),
    Case("flwr", "FedAdam, v from 0", f"fedadam {STRATEGY}:FedAdam --theirs eta=0.01 --set v_init=0"),
    Case("flwr", "FedAdam, v from 0, with its correction", f"fedadam {STRATEGY}:FedAdam --set preset=flower"),
    Case("flwr", "FedYogi", f"fedyogi {STRATEGY}:FedYogi"),
    Case("flwr", "FedYogi, v from 0", f"fedyogi {STRATEGY}:FedYogi --set preset=flower"),
    Case("flwr", "FedAdagrad", f"fedadagrad {STRATEGY}:FedAdagrad"),
    Case("flwr", "FedAdagrad, v from 0", f"fedadagrad {STRATEGY}:FedAdagrad --set preset=flower"),
    Case("flwr", "FedProx, the client of its docstring", "fedprox flower_targets:fedprox_docs"),
    Case("flwr", "FedProx, with the squared norm", "fedprox flower_targets:fedprox_squared"),
    Case("flwr", "FedMedian", f"fedavg {STRATEGY}:FedMedian --set aggregation=median"),
    Case(
        "flwr",
        "FedMedian, by examples",
        f"fedavg {STRATEGY}:FedMedian --set aggregation=median --set weighting=examples",
    ),
    Case(
        "flwr",
        "FedTrimmedAvg, 10 clients",
        f"fedavg {STRATEGY}:FedTrimmedAvg --set aggregation=trimmed_mean --clients 10",
    ),
    Case(
        "flwr",
        "FedTrimmedAvg, 7 clients",
        f"fedavg {STRATEGY}:FedTrimmedAvg --set aggregation=trimmed_mean --clients 7",
    ),
    Case("flwr", "Krum", "fedavg flower_targets:krum --clients 7 --set aggregation=flower_targets:PaperKrum"),
    Case("flwr", "FedProx, its server", f"fedprox {STRATEGY}:FedProx --theirs proximal_mu=0.1"),
    Case("optax", "adam, on the server", f"fedadam optax_targets:server --theirs name=adam {ADAM}"),
    Case(
        "optax",
        "amsgrad, on the server",
        f"fedadam optax_targets:server --theirs name=amsgrad --set amsgrad=true {ADAM}",
    ),
    Case(
        "optax",
        "amsgrad, against ours with optax's correction",
        f"optax_targets:OptaxAmsgrad optax_targets:server --theirs name=amsgrad --set amsgrad=true {ADAM}",
    ),
    Case("optax", "yogi, on the server", "fedyogi optax_targets:server --theirs name=yogi --theirs b2=0.99"),
    Case(
        "optax",
        "yogi, against ours with optax's correction and start",
        "optax_targets:OptaxYogi optax_targets:server --theirs name=yogi --theirs b2=0.99",
    ),
    Case("optax", "adagrad, on the server", "fedadagrad optax_targets:server --theirs name=adagrad"),
    Case(
        "optax",
        "adagrad, v from 0.1, no ε",
        "fedadagrad optax_targets:server --theirs name=adagrad --theirs eps=0.0 --set v_init=0.1 --set tau=0",
    ),
    Case("optax", "sgd with momentum", "fedavgm optax_targets:server --theirs name=sgd --theirs momentum=0.9"),
    Case(
        "optax",
        "adamw, on the clients",
        "localadamw optax_targets:local --theirs name=adamw --theirs weight_decay=0.01",
    ),
    Case("optax", "lion, on the clients", "fedlion optax_targets:lion --theirs weight_decay=0.0"),
    Case("optax", "lion, with its defaults", "fedlion optax_targets:lion"),
    Case("optax", "lars, on the clients", "fedlars optax_targets:lars --set phi_min=0"),
    Case("pfl", "FedProx", "fedprox pfl_targets:fedprox"),
    Case("pfl", "SCAFFOLD, option II", "scaffold pfl_targets:scaffold --tolerance 1e-5"),
    Case(
        "pfl", "SCAFFOLD, against ours with pfl's sign", "pfl_targets:PflScaffold pfl_targets:scaffold --tolerance 1e-5"
    ),
    Case("pfl", "Adam as the server's optimizer", f"fedadam pfl_targets:server {ADAM}"),
    Case(
        "pfl",
        "Adam against the paper's FedAdam",
        "fedadam pfl_targets:server --theirs betas=[0.9,0.99] --theirs eps=1e-3",
    ),
    Case(
        "pfl", "SGD with momentum as the server's", "fedavgm pfl_targets:server --theirs name=SGD --theirs momentum=0.9"
    ),
    Case("fedjax", "FedAvg", "fedavg fedjax_targets:fedavg"),
    Case("fedjax", "FedProx", "fedprox fedjax_targets:fedprox"),
    Case("fedjax", "adam, on the server", f"fedadam fedjax_targets:server {ADAM}"),
    Case("fedjax", "yogi, on the server", "fedyogi fedjax_targets:server --theirs name=yogi --theirs b2=0.99"),
    Case("fedjax", "adagrad, on the server", "fedadagrad fedjax_targets:server --theirs name=adagrad"),
    Case(
        "fedjax",
        "adagrad, v from 0.1, no ε",
        "fedadagrad fedjax_targets:server --theirs name=adagrad --theirs eps=0.0 --set v_init=0.1 --set tau=0",
    ),
    Case(
        "fedjax",
        "yogi, against ours with optax's correction and start",
        "optax_targets:OptaxYogi fedjax_targets:server --theirs name=yogi --theirs b2=0.99",
    ),
    Case(
        "fedjax",
        "sgd with momentum, on the server",
        "fedavgm fedjax_targets:server --theirs name=sgd --theirs momentum=0.9",
    ),
    Case("fedjax", "Mime with Adam", "mime fedjax_targets:mime_adam --set preset=mime"),
    Case("fedjax", "Mime Lite with Adam", "mime fedjax_targets:mimelite_adam --set preset=mimelite"),
    Case(
        "fedjax",
        "Mime Lite, against ours with FedJAX's square",
        "fedjax_targets:FedjaxMimeLite fedjax_targets:mimelite_adam --theirs rounds_before=1000000 "
        "--set momentum=server --set amsgrad=false",
    ),
]

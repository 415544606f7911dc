# Shortcuts for a checkout. Each target is one or two commands that can also be typed; docs/tasks/scripts.md lists them.
#
#   make setup                    install this checkout into .venv
#   make server MODEL=my-model    run a node in the background; make server-stop ends it, make kill-all all of them
#   make verify HOSTS="a b"       check machines over SSH, and nodes by NODES="http://a:52415 http://b:52415"

ifneq ($(wildcard .venv/bin),)
export PATH := $(CURDIR)/.venv/bin:$(PATH)
endif
EXO_MESH ?= exo-mesh
HOSTS ?=
NODES ?=
HOSTFILE ?=
MODEL ?=
API ?= http://127.0.0.1:52415
EXTRAS ?= dev
FLAGS ?=
with_hostfile = $(if $(HOSTFILE),--hostfile $(HOSTFILE))

.DEFAULT_GOAL := help
.PHONY: help setup bootstrap sync verify info rdma-test server server-stop kill-all bench memory health download \
	test test-all lint proto hostfiles monitoring-check monitoring-up

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

setup: ## install this checkout into .venv (EXTRAS=dev)
	scripts/setup.sh --extras $(EXTRAS)

bootstrap: ## install this checkout on other machines over SSH (HOSTS="a b", HOSTFILE=)
	scripts/bootstrap_node.sh $(with_hostfile) $(HOSTS)

sync: ## update other machines to this version, one after the other (HOSTS, HOSTFILE)
	scripts/sync_nodes.sh $(with_hostfile) $(HOSTS)

verify: ## check this machine, HOSTS over SSH and NODES over HTTP
	$(EXO_MESH) doctor
	$(if $(HOSTS)$(NODES)$(HOSTFILE),scripts/verify_cluster.sh $(with_hostfile) $(HOSTS) $(NODES))

info: ## show nodes side by side (NODES, HOSTS; by default all nodes that the local node knows)
	scripts/cluster_info.sh $(with_hostfile) $(HOSTS) $(NODES)

rdma-test: ## RDMA doctor, bandwidth sweep and stress (HOSTFILE; without it two ranks here over TCP)
	scripts/rdma_test.sh $(with_hostfile) $(FLAGS)

server: ## run a node in the background (MODEL, HOSTFILE, FLAGS of exo-mesh serve)
	scripts/run_server.sh $(if $(MODEL),--model $(MODEL)) $(with_hostfile) $(if $(FLAGS),-- $(FLAGS))

server-stop: ## stop the node that `make server` started
	scripts/stop_server.sh

kill-all: ## end every node and runner of this machine, hanging ones included
	scripts/stop_server.sh --all

bench: ## measure tokens per second (MODEL at API, or FLAGS; by default a small random model over two local nodes)
	scripts/tps_bench.sh $(if $(MODEL),$(API) $(MODEL)) $(if $(MODEL)$(FLAGS),$(FLAGS),--random 40M --peers 2)

memory: ## show the memory that models may use here and in the mesh
	$(EXO_MESH) engines
	$(EXO_MESH) top --once --api-url $(API)

health: ## show whether the node at API is ready, and the problems of the mesh
	$(EXO_MESH) status --api-url $(API)

download: ## fetch a model (MODEL=org/name)
	$(if $(MODEL),,$(error make download MODEL=org/name))
	$(EXO_MESH) pull $(MODEL) --api-url $(API)

test: ## run the quick tests
	pytest -n 2

test-all: ## run everything that CI checks
	.ci/run

lint: ## check lint, format, types, import rules and shell scripts
	ruff check .
	ruff format --check .
	mypy
	PYTHONPATH=.:engines lint-imports
	shellcheck scripts/*.sh

proto: ## generate exo_mesh/wire/proto from protos
	python -m tools.generate_protos

hostfiles: ## check the example hostfiles
	for file in hostfiles/*.json hostfiles/*.example; do $(EXO_MESH) hostfile $$file || exit 1; done

monitoring-check: ## check the Prometheus configuration and rules
	promtool check config monitoring/prometheus/prometheus.yml

monitoring-up: ## start Prometheus, Grafana and node_exporter in containers
	docker compose -f monitoring/docker-compose.yml up -d

# make                 lists what make does
# make setup           creates .venv with the packages of requirements.lock
# make train           trains LeNet by hand on two devices; ARGS="--flag=value …" is passed on
# make test            runs the tests but the slowest; make test-all runs all of them
# make coverage        runs the tests, and says which lines of lockstep/ and strategies/ none runs
# make package         builds the wheel and the archive of lockstep/ into dist/, and checks both
# make lint            checks style, format, types, the layers of imports, state of modules, and words
# make docs            writes docs/options.md and the names in docs/verdict.md from their tables
# make site            writes the documents as a site into site/, and checks its links
# make campaign        disturbs small trainings at random; ARGS="kills --cycles=20 --seed=1", or fuzz
# make cases           verifies the programs of the data set of silent bugs, right and wrong ones, and
#                      compares verdicts with those expected; ARGS="losses --tool=plain"; ARGS=--help
# make recordings      records those programs of which `make test` judges the recordings
# make mutations       inserts bugs one at a time and lists which test detects each
# make frameworks      installs PyTorch and JAX into .venv-bench, for frameworks/ and the tests of the
#                      recorders, which make test skips without it
# make bench           compares speed with PyTorch, JAX and Keras, and writes benchmarks/RESULTS.md
# make accuracy        trains each model in full with recipe fast, LeNet with five seeds
# make recording       runs the commands of the README and writes docs/recording.svg
# make lock            writes requirements.lock from requirements.txt
# make clean           removes .venv, .venv-bench and caches
PYTHON ?= python3
BIN := .venv/bin
# Prints the packages of the extra `dev`; to install it would install the package itself, too.
DEV := $(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"], sep="\n")'
COVERAGE_OF_BENCH = .venv-bench/bin/python -m pip install --quiet --disable-pip-version-check $$($(DEV) | grep coverage)
# What is not written: a role has its name, a training resumes, and weights are bitwise identical.
WORDS := whoever|nobody|somebody|in silence|witness(es)?|spoil(s|ed|ing)?|onlooker|mend(s|ed|ing)?
WORDS := $(WORDS)|the same bits|go(es)? on|went on|(is|are|was|were) cut off|told of|the book

# Small programs of each kind, with most places and names.
RECORDED := adapters/checkpointed_towers adapters/drawn_projections adapters/lora_dropout
RECORDED += adapters/merged_for_generation adapters/modules_to_save_tied averages/keras_ema
RECORDED += averages/local_updates averages/norm_of_metrics averages/unequal_batches
RECORDED += data/dispatched_batches data/nodes_of_a_batch data/size_for_all_replicas
RECORDED += data/uneven_join experts/shared_and_noisy experts/summed_tokens gathered/label_offset
RECORDED += gathered/rows_within_norm jax/batch_norm_axis jax/clipped_parts jax/key_of_each_step
RECORDED += jax/sampled_waves jax/skipped_transition keras/clipped_on_one_rank keras/decay_of_biases
RECORDED += keras/frozen_later keras/local_batch_norm keras/no_reshuffle keras/scalar_loss
RECORDED += keras/stale_bucket keras/traced_rate keras/weighted_examples losses/conflicting_tasks
RECORDED += losses/masked_pmean losses/quantiles losses/turns_of_two parallel/shared_bias
RECORDED += parallel/transposed_spectrum precision/compressed_gradients precision/float8_amax
RECORDED += precision/fsdp_reduce_dtype precision/loss_dtype_jax precision/lost_epsilon
RECORDED += precision/overflow_on_one_rank precision/scaled_by_hand random/equal_masks
RECORDED += random/jax_keys random/one_coin random/size_of_pictures resume/divergence_weight
RECORDED += resume/jax_restored_tree resume/loss_scale sharded/flat_buffer_padding
RECORDED += sharded/master_weights sharded/muon_column_parallel sharded/replicated_shards
RECORDED += sharded/values_of_shards

.PHONY: help setup train test test-all coverage package lint mutations campaign cases bench accuracy
.PHONY: docs site frameworks recording recordings lock clean

help:
	@sed -n '/^# make /,/^# make clean/s/^# //p' Makefile

train: $(BIN)/.installed
	$(BIN)/python main.py $(ARGS)

test: $(BIN)/.installed-dev
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: $(BIN)/.installed-dev
	$(BIN)/python -m pytest $(ARGS)

coverage: $(BIN)/.installed-dev .venv-bench/.installed
	$(COVERAGE_OF_BENCH)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

package: $(BIN)/.installed-dev
	rm -rf dist
	$(BIN)/uv build --quiet
	$(BIN)/twine check --strict dist/*

mutations: $(BIN)/.installed-dev .venv-bench/.installed
	$(COVERAGE_OF_BENCH)
	$(BIN)/python -m tests.campaigns mutations $(ARGS)

lint: $(BIN)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	$(BIN)/mypy --python-version=3.10 lockstep
	! git grep -nE '^ *(from|import) (app|models|strategies)\b' -- frameworks
	! git grep -nE 'keras\.src|tensorflow\.(python|compiler|core|tsl)\b' -- app main.py models \
	  strategies ':!strategies/tf_private.py'
	! git grep -nE '^_?[a-z]\w*(: .+)? = (\[|\{|list\(|dict\(|set\(|None$$)' -- app
	! git grep -nwiE '$(WORDS)' -- '*.md' '*.py' docs/tour.ipynb deploy

campaign: $(BIN)/.installed-dev
	$(BIN)/python -m tests.campaigns $(ARGS)

cases: $(BIN)/.installed-dev .venv-bench/.installed
	$(BIN)/python -m cases $(ARGS)

recordings: $(BIN)/.installed-dev .venv-bench/.installed
	rm -rf build/recorded
	$(BIN)/python -m cases $(RECORDED) --keep=build/recorded
	find build/recorded ! -type d ! -name 'out*.npz' ! -name end.json -delete
	tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C build/recorded -cJf tests/recordings.tar.xz .

bench: $(BIN)/.installed .venv-bench/.installed
	$(BIN)/python benchmarks/run.py --output=benchmarks/RESULTS.md $(ARGS)

# Each training is a run directory under runs/accuracy, which a report then compares.
FULL := train --recipe=fast --precision=mixed_bfloat16 --dataset=fashion_mnist --device=cpu
FULL += --num_devices=2 --epochs=10

accuracy: $(BIN)/.installed
	for seed in 0 1 2 3 4; do \
	  $(BIN)/python main.py $(FULL) --model=lenet --global_batch_size=128 --seed=$$seed --out=runs/accuracy/lenet-$$seed || exit; \
	done
	$(BIN)/python main.py $(FULL) --model=resnet18 --out=runs/accuracy/resnet18
	$(BIN)/python main.py report runs/accuracy/* --out=runs/accuracy.html

setup: $(BIN)/.installed

$(BIN)/.installed: requirements.lock
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: Python must be 3.11 or newer, got %d.%d; use make PYTHON=python3.11" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing TensorFlow and what else is needed into .venv: once, a minute or two"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $<
	@touch $@

lock: $(BIN)/.installed-dev
	@echo "# Every package with the hashes of its files, for Python 3.11 to 3.13; from requirements.txt by: make lock" > requirements.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header requirements.txt >> requirements.lock

$(BIN)/.installed-dev: $(BIN)/.installed pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt $$($(DEV))
	@touch $@

.venv-bench/.installed: benchmarks/requirements.txt
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	@echo "installing PyTorch and JAX into .venv-bench: once, some minutes"
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

frameworks: .venv-bench/.installed

recording: $(BIN)/.installed
	$(BIN)/python docs/recording.py

docs: $(BIN)/.installed
	$(BIN)/python -m app.options.help
	PYTHONPATH=. $(BIN)/python docs/names.py

site: $(BIN)/.installed-dev
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv .venv-bench .pytest_cache .ruff_cache .mypy_cache

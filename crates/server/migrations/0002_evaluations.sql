-- Registered definitions, evaluations, their runs and outcomes.
CREATE TABLE definitions (
    organization_id TEXT NOT NULL,
    -- model, environment
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    version BIGINT NOT NULL,
    -- JSON of the definition as it would stand in a request
    definition TEXT NOT NULL,
    -- JSON of the describe document; NULL until described
    describe TEXT,
    created_at BIGINT NOT NULL,
    created_by TEXT NOT NULL,
    PRIMARY KEY (organization_id, kind, name, version)
);
CREATE TABLE evaluations (
    id TEXT PRIMARY KEY,
    organization_id TEXT NOT NULL,
    name TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    created_by TEXT NOT NULL,
    client_token TEXT,
    -- SHA-256 of the canonical request: tells a repeat from another request
    request_hash TEXT NOT NULL,
    request TEXT NOT NULL,
    spec TEXT NOT NULL,
    warnings TEXT NOT NULL,
    cluster_id TEXT,
    priority BIGINT NOT NULL,
    status TEXT NOT NULL,
    cancel_requested_at BIGINT,
    rows_total BIGINT NOT NULL,
    -- kept equal to the counts in outcomes, in the same transaction
    rows_scored BIGINT NOT NULL,
    rows_errored BIGINT NOT NULL,
    started_at BIGINT,
    finished_at BIGINT,
    deleted_at BIGINT,
    UNIQUE (organization_id, client_token)
);
CREATE INDEX evaluations_organization ON evaluations (organization_id, id);
CREATE TABLE evaluation_tags (
    evaluation_id TEXT NOT NULL REFERENCES evaluations (id),
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (evaluation_id, key)
);
CREATE TABLE segments (
    evaluation_id TEXT NOT NULL REFERENCES evaluations (id),
    first_row BIGINT NOT NULL,
    row_count BIGINT NOT NULL,
    -- positions in the evaluation's models and tasks
    model BIGINT NOT NULL,
    task BIGINT NOT NULL,
    -- JSON of rlm_core::rows::Segment; one with explicit seeds is stored in pieces, so that a page reads little
    segment TEXT NOT NULL,
    PRIMARY KEY (evaluation_id, first_row)
);
CREATE TABLE runs (
    id TEXT PRIMARY KEY,
    evaluation_id TEXT NOT NULL REFERENCES evaluations (id),
    organization_id TEXT NOT NULL,
    state TEXT NOT NULL,
    -- grows with each lease; fences commands and status, never results
    generation BIGINT NOT NULL,
    cluster_id TEXT,
    model TEXT NOT NULL,
    env TEXT NOT NULL,
    rows_total BIGINT NOT NULL,
    -- JSON of rlm_core::evaluation::RunSpec (its generation is the one at creation; the lease sets it)
    spec TEXT NOT NULL,
    -- JSON list of rlm_core::rows::Segment
    segments TEXT NOT NULL,
    priority BIGINT NOT NULL,
    submitter TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    leased_at BIGINT,
    started_at BIGINT,
    finished_at BIGINT,
    -- JSON of rlm_core::run::Waiting
    waiting TEXT,
    failure TEXT,
    provenance TEXT,
    -- JSON: generation -> rlm_core::evaluation::RunMetrics
    metrics TEXT
);
CREATE INDEX runs_evaluation ON runs (evaluation_id);
CREATE INDEX runs_state ON runs (state, priority);
CREATE INDEX runs_cluster ON runs (cluster_id, state);
-- The outcome that counts: the first scored attempt stored, else the latest errored one (by generation and attempt).
CREATE TABLE outcomes (
    evaluation_id TEXT NOT NULL,
    row_number BIGINT NOT NULL,
    -- positions in the evaluation's models and tasks
    model BIGINT NOT NULL,
    task BIGINT NOT NULL,
    run_id TEXT NOT NULL,
    generation BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    seed BIGINT NOT NULL,
    -- 1: scored, 0: errored
    scored BIGINT NOT NULL,
    reward DOUBLE PRECISION,
    steps BIGINT,
    terminated BIGINT,
    truncated BIGINT,
    success BIGINT,
    first_observation_sha256 TEXT,
    conformance_warnings BIGINT NOT NULL,
    failure TEXT,
    failure_code TEXT,
    started_at BIGINT NOT NULL,
    ended_at BIGINT NOT NULL,
    PRIMARY KEY (evaluation_id, row_number)
);
CREATE INDEX outcomes_errored ON outcomes (evaluation_id, row_number, failure_code) WHERE scored = 0;
-- Every errored attempt, and scored attempts that came after the one that counts.
CREATE TABLE attempts (
    evaluation_id TEXT NOT NULL,
    row_number BIGINT NOT NULL,
    generation BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    run_id TEXT NOT NULL,
    -- JSON of the episode
    episode TEXT NOT NULL,
    PRIMARY KEY (evaluation_id, row_number, generation, attempt)
);

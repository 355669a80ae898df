-- Clusters, their join tokens, credentials and agents.
CREATE TABLE clusters (
    id TEXT PRIMARY KEY,
    organization_id TEXT NOT NULL,
    name TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    created_by TEXT NOT NULL,
    archived_at BIGINT,
    draining BIGINT NOT NULL,
    -- last message of an agent, by the server's clock
    last_seen_at BIGINT,
    -- when the live session ended; NULL while one is up
    disconnected_at BIGINT,
    session_generation BIGINT NOT NULL,
    instance_id TEXT,
    executor TEXT,
    kube_system_uid TEXT,
    agent_version TEXT,
    chart_version TEXT,
    kubernetes_version TEXT,
    inventory TEXT NOT NULL,
    conditions TEXT NOT NULL,
    unacknowledged_records BIGINT NOT NULL,
    UNIQUE (organization_id, name)
);
CREATE TABLE join_tokens (
    id TEXT PRIMARY KEY,
    hash TEXT NOT NULL UNIQUE,
    cluster_id TEXT NOT NULL REFERENCES clusters (id),
    created_at BIGINT NOT NULL,
    created_by TEXT NOT NULL,
    expires_at BIGINT NOT NULL,
    used_at BIGINT,
    -- nonce of the agent that used it: the same agent may ask again until the token expires
    used_nonce TEXT,
    -- JSON: purpose -> credential id that the exchange made
    exchange TEXT,
    revoked_at BIGINT,
    superseded_at BIGINT
);
CREATE TABLE cluster_credentials (
    id TEXT PRIMARY KEY,
    cluster_id TEXT NOT NULL REFERENCES clusters (id),
    -- control, pull, relay
    purpose TEXT NOT NULL,
    hash TEXT NOT NULL UNIQUE,
    created_at BIGINT NOT NULL,
    -- end of the overlap after a rotation or rejoin; NULL while active
    retires_at BIGINT,
    revoked_at BIGINT,
    last_used_at BIGINT
);
CREATE INDEX cluster_credentials_cluster ON cluster_credentials (cluster_id, purpose);
-- How far each agent instance's records are durable here.
CREATE TABLE agent_positions (
    cluster_id TEXT NOT NULL,
    instance_id TEXT NOT NULL,
    durable BIGINT NOT NULL,
    PRIMARY KEY (cluster_id, instance_id)
);
